"""Generates oncebox/v1 from protos/. With --check: says whether what is committed is what the .proto files give."""

import filecmp
import os
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def generate(target: Path) -> None:
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"--python_out={target}", f"--pyi_out={target}"]
    arguments += [f"--grpc_python_out={target}", f"--mypy_grpc_out=quiet:{target}"]
    if protoc.main(arguments + [str(path) for path in PROTOS]) != 0:
        sys.exit("protoc failed")
    package = target / "oncebox" / "v1"
    (package / "__init__.py").write_text('"""Generated from protos/oncebox/v1 by `make protos`; do not edit."""\n')
    for path in package.glob("*_pb2_grpc.py*"):
        # Files without a service have nothing to call.
        if not re.search(r"class \w+Stub", path.read_text()):
            path.unlink()


def main() -> None:
    # protoc finds its plugin for stubs (mypy-protobuf) on the path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    committed = ROOT / "oncebox" / "v1"
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "oncebox" / "v1"
        names = {path.name for path in fresh.iterdir()}
        present = {path.name for path in committed.glob("*.py*")} if committed.exists() else set()
        _, differing, missing = filecmp.cmpfiles(fresh, committed, names, shallow=False)
        stale = sorted({*differing, *missing, *(present - names)})
        if "--check" in sys.argv:
            sys.exit(f"oncebox/v1 is stale ({', '.join(stale)}): run `make protos`" if stale else None)
        committed.mkdir(exist_ok=True)
        for name in present - names:
            (committed / name).unlink()
        for name in names:
            (committed / name).write_bytes((fresh / name).read_bytes())


if __name__ == "__main__":
    main()
