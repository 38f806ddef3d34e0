"""`python -m tests.support.asker HOST PORT`: for each line (seconds) sends a byte, and says what came back by then."""

import socket
import sys
import time

CONNECT_S = 60.0
AGAIN_S = 0.05


def connect(host: str, port: int) -> socket.socket:
    """Who is to listen there may not be up yet."""
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=1)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(AGAIN_S)


def main(host: str, port: str) -> None:
    with connect(host, int(port)) as connection:
        awaited = 0
        for line in sys.stdin:
            connection.sendall(b".")
            awaited += 1
            connection.settimeout(float(line))
            try:
                while awaited:
                    awaited -= len(connection.recv(awaited))
            except TimeoutError:
                pass
            print("nothing" if awaited else "heard", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
