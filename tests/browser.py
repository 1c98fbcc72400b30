"""Chromium, without a window or a network, for the tests of pages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZE = (1280, 3400)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine (apt-get install chromium)")


class Elements(HTMLParser):
    """All tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def browse(page: Path, *options: str, cwd: Path) -> str:
    """What the browser prints for the page, with no network to fall back on."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    command += [
        f"--user-data-dir={cwd / 'profile'}",
        f"--window-size={SIZE[0]},{SIZE[1]}",
        "--force-color-profile=srgb",
    ]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180, cwd=cwd).stdout


def seen_in(page: str, look: str, folder: Path) -> Any:
    """What a script that is put into the page, which would forbid it, sees there."""
    body = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page).replace("</body>", look + "</body>")
    (folder / "page.html").write_text(body, encoding="utf-8")
    shown = browse(folder / "page.html", "--dump-dom", cwd=folder)
    attribute = next(attrs["data-seen"] for tag, attrs in Elements(shown).found if tag == "body")
    assert attribute is not None
    return json.loads(attribute)
