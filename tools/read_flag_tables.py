"""Write the flag tables in slime/config/flags from the wheels of the packages they describe.

    pip download --no-deps --dest wheels megatron-core==0.16.1 sglang-router==0.3.2
    pip download --no-deps --dest wheels sglang==0.5.16
    pip download --no-deps --dest wheels sglang==0.5.23
    python tools/read_flag_tables.py wheels

Nothing is imported from the packages: their dataclasses and parsers are read as text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flag_tables.megatron import read_megatron
from flag_tables.router import read_router
from flag_tables.sglang import merge_versions, read_sglang
from flag_tables.source import Source

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "slime" / "config" / "flags"
VERSIONS = {
    "megatron_core": ["0.16.1"],
    "sglang": ["0.5.16", "0.5.23"],
    "sglang_router": ["0.3.2"],
}


def main(folder: str) -> None:
    sources = {
        package: [_source(Path(folder), package, version) for version in versions]
        for package, versions in VERSIONS.items()
    }
    older, newer = (read_sglang(source) for source in sources["sglang"])
    _write("megatron", "megatron_core", read_megatron(sources["megatron_core"][0]))
    _write("sglang", "sglang", merge_versions(older, newer))
    _write("router", "sglang_router", read_router(sources["sglang_router"][0]))


def _source(folder: Path, package: str, version: str) -> Source:
    return Source(next(folder.glob(f"{package}-{version}-*.whl")))


def _write(table: str, package: str, rows: list[dict[str, Any]]) -> None:
    """Write one row per line, without empty values, so that a diff shows what a version changed."""
    kept = [
        {k: v for k, v in row.items() if v or (k == "default" and v is not None)} for row in rows
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept)
    head = json.dumps({"package": package, "versions": VERSIONS[package]})[:-1]
    (OUTPUT / f"{table}.json").write_text(f'{head}, "flags": [\n{lines}\n]}}\n')
    print(f"{table}.json: {len(rows)} flags of {package} {', '.join(VERSIONS[package])}")


if __name__ == "__main__":
    main(sys.argv[1])
