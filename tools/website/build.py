"""`make site`: the documentation and the playground, in build/site, which any server of files, or
`python -m http.server --directory build/site`, can show. `SITE_URL=https://…/` is where it will be,
for the pictures of links to it.

    pages.py              the pages, which the generator turns into the site; a dead link ends it
    playground_page.py    the playground, which is put beside them
"""

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template

from tools.website.front import write_pictures
from tools.website.pages import gallery_entries, write_pages
from tools.website.playground_page import write_playground

_HERE = Path(__file__).parent
ROOT = _HERE.parents[1]
BUILD = ROOT / "build"
SITE = BUILD / "site"


def build_site() -> None:
    """Write the whole site."""
    packages = install_packages()
    pages = BUILD / "pages"
    write_pages(pages)
    assets = pages / "assets"
    assets.mkdir()
    for name in ("site.css", "web/site.js"):
        shutil.copy(_HERE / name, assets)
    shutil.copy(ROOT / "docs" / "pictures" / "logo.svg", assets)
    write_pictures(pages)
    overrides = BUILD / "overrides"
    shutil.rmtree(overrides, ignore_errors=True)
    shutil.copytree(_HERE / "web" / "overrides", overrides)
    shutil.copy(packages / "mermaid" / "dist" / "mermaid.min.js", assets)
    shutil.copy(
        packages / "iframe-worker" / "shim" / "index.js", assets / "iframe-worker.js"
    )
    generate()
    mend_tables(SITE)
    write_playground(packages, BUILD / "wheels", SITE / "playground")


def install_packages() -> Path:
    """The packages of npm that package.json names, in the versions of its lock."""
    folder = BUILD / "website"
    lock = _HERE / "package-lock.json"
    installed = folder / "installed.json"
    # A copy of the lock says what is installed: it is written last, so that an installation that
    # ended half way is done again.
    if not installed.exists() or not filecmp.cmp(lock, installed, shallow=False):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(_HERE / "package.json", folder)
        shutil.copy(lock, folder)
        subprocess.run(
            ["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True
        )
        shutil.copy(lock, installed)
    return folder / "node_modules"


def configuration() -> str:
    """The generator's configuration, with the programs of the gallery and the site's address."""
    text = Template((_HERE / "zensical.toml").read_text("utf-8"))
    address = os.environ.get("SITE_URL", "")
    return text.substitute(gallery=gallery_entries(), address=address)


def generate() -> None:
    """Run the generator over the pages; what it warns of ends it."""
    (BUILD / "zensical.toml").write_text(configuration(), "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=BUILD, check=True)


def mend_tables(site: Path) -> None:
    """Turn the empty heads of tables into plain cells: a screen reader announces a head that has no
    text as the nameless title of its column.
    """
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        if "<th></th>" in text:
            page.write_text(text.replace("<th></th>", "<td></td>"), "utf-8")


if __name__ == "__main__":
    build_site()
