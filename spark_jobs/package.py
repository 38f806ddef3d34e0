"""python -m spark_jobs.package FILE.zip: our Python code as one archive for spark-submit's --py-files."""

from __future__ import annotations

import sys
import zipfile
from importlib.resources import files
from pathlib import Path

PACKAGES = ("oncebox", "spark_jobs")


def write(archive: Path) -> Path:
    """Code and the files beside it; what is compiled or generated for this machine is left out."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for package in PACKAGES:
            root = Path(str(files(package)))
            for path in sorted(root.rglob("*")):
                inside = path.relative_to(root.parent)
                if path.is_file() and "__pycache__" not in inside.parts:
                    packed.write(path, str(inside))
    return archive


if __name__ == "__main__":
    sys.stdout.write(f"{write(Path(sys.argv[1]))}\n")
