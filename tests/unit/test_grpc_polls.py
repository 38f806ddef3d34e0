"""The coordinator's process has gRPC poll in place. In processes of their own: gRPC reads the setting once."""

import subprocess
import sys

import pytest

CALLS = 300
TURNS = 5  # idle threads wake now and then, too: the quietest turn counts
SCRIPT = f"""
import asyncio, pathlib, re
import coordinator
import grpc

def wakes():
    told = [task.joinpath("status").read_text() for task in pathlib.Path("/proc/self/task").iterdir()]
    return sum(int(re.search(r"^voluntary\\S+\\s+(\\d+)", each, re.M)[1]) for each in told if "event_engine" in each)

async def echo(request, context):
    return request

async def main():
    server = grpc.aio.server()
    handlers = {{"Echo": grpc.unary_unary_rpc_method_handler(echo)}}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        ask = channel.unary_unary("/test/Echo")
        await ask(b"x")
        woken = []
        for _ in range({TURNS}):
            before = wakes()
            for _ in range({CALLS}):
                await ask(b"x")
            woken.append(wakes() - before)
        print(min(woken))
    await server.stop(None)

asyncio.run(main())
"""


@pytest.mark.parametrize("given", [None, ""])
def test_messages_change_no_threads_unless_the_user_wants_it(given: str | None) -> None:
    environment = {} if given is None else {"GRPC_EXPERIMENTS": given}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert "Unknown experiment" not in done.stderr
    assert (int(done.stdout) < CALLS / 2) == (given is None)
