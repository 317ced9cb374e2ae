"""Print the requirements of the named extras of pyproject.toml, one per line.

This allows installing them without building the package, and without writing them twice.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    print("\n".join(sorted({name for extra in sys.argv[1:] for name in extras[extra]})))


if __name__ == "__main__":
    main()
