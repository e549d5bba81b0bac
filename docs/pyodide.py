"""`python docs/pyodide.py FOLDER` copies Pyodide, which is Python for browsers, to a folder of the website.

`docs/explorer/pyodide.json` names its package, its version and the SHA-256 of each file that a page needs.
npm brings the package once, into `build`. Only a file with its listed checksum is kept, and each use compares
it again.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "docs" / "explorer" / "pyodide.json"
NO_NPM = (
    "The explorer's page needs Pyodide, which npm brings, and npm is not here:"
    " install Node.js, which contains it."
)


class NotBrought(Exception):
    """Pyodide could not be fetched: there is no npm, or it found no network or no package."""


class Mismatch(Exception):
    """A file is not the one that `pyodide.json` lists."""


def files(listed: Path = LISTED, build: Path = ROOT / "build") -> list[Path]:
    """The files of Pyodide that a page loads, fetched by npm unless an earlier call did.

    Raises NotBrought where npm is missing or fails, Mismatch for a file whose checksum is not the listed one.
    """
    wanted = json.loads(listed.read_text(encoding="utf-8"))
    package = f"{wanted['package']}@{wanted['version']}"
    cache = build / package.replace("@", "-")
    paths = {cache / name: checksum for name, checksum in wanted["files"].items()}
    if not all(path.exists() for path in paths):
        _fetch(package, wanted["files"], cache)
    for path, checksum in paths.items():
        _compare(path.name, path.read_bytes(), checksum, f"delete {cache} and build again")
    return list(paths)


def _fetch(package: str, checksums: dict[str, str], cache: Path) -> None:
    """Put a package's listed files into `cache`, each whole or not at all: another build may do the same."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotBrought(NO_NPM)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name_of_folder:
        folder = Path(name_of_folder)
        command = [npm, "pack", package, "--pack-destination", str(folder)]
        command += ["--fetch-retries=1", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        packed = next(folder.glob("*.tgz"), None)
        if done.returncode or packed is None:
            said = done.stderr.strip().splitlines()[:2]
            raise NotBrought(f"npm could not bring {package}: {' '.join(said)}. Is there a network?")
        with tarfile.open(packed) as archive:
            for name, checksum in checksums.items():
                content = _member(archive, f"package/{name}")
                _compare(name, content, checksum, f"{LISTED.name} has to list what {package} contains")
                (folder / name).write_bytes(content)
                (folder / name).replace(cache / name)


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    """The content of a file in an archive; nothing where there is no such file."""
    held = {member.name: member for member in archive.getmembers() if member.isfile()}
    if name not in held:
        return b""
    file = archive.extractfile(held[name])
    return file.read() if file else b""


def _compare(name: str, content: bytes, checksum: str, advice: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != checksum:
        raise Mismatch(f"{name} has the SHA-256 {found}, and {LISTED.name} lists {checksum}: {advice}.")


def main(out: Path) -> int:
    """Copy the files to `out`; 1, with a sentence on stderr, where they cannot be had."""
    try:
        found = files()
    except (NotBrought, Mismatch) as problem:
        print(problem, file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copyfile(path, out / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
