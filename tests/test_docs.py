"""docs/ as a site: every page has its place, and the arrows drawn in concepts.md are those of the
machines. `make docs` sees to links and anchors."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from hisparse.fsm.machines import MACHINES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_every_page_has_one_place_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .+: (\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_arrows_of_the_concepts_are_arrows_of_the_machines():
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    arrow = re.compile(r"^    (\w+) --> (\w+): (\w+)$", re.MULTILINE)
    arrows = {
        (source, trigger, target)
        for machine in MACHINES
        for source, target, trigger in arrow.findall(machine.mermaid())
    }
    drawn = re.findall(r"(?=\b([A-Z]+) ─+(\w+)─+► ([A-Z]+)\b)", text)
    drawn += [(a, t, b) for b, t, a in re.findall(r"(?=\b([A-Z]+) ◄─(\w+)─ ([A-Z]+)\b)", text)]
    assert len(drawn) >= 8 and set(drawn) <= arrows, set(drawn) - arrows


def test_the_front_page_leads_to_every_page_and_names_the_extras_of_users():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", text)) == pages
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(project["project"]["optional-dependencies"]) - {"test", "lint", "docs"}
    assert extras and not [extra for extra in extras if not re.search(rf"\b{extra}\b", text)]


def test_the_words_of_the_cuda_page_are_explained_before_it_uses_them():
    text = (DOCS / "cuda.md").read_text(encoding="utf-8")
    before, _, rest = text.partition("\n## Words\n")
    table, _, after = rest.partition("\n## ")
    explained = re.findall(r"(?:^\| \*\*|its \*|the \*)([a-z ]+)\*", table, re.MULTILINE)
    for word in ("row", "request row", "line", "span", "wave", "floor", "ordinal"):
        use = re.compile(rf"\b{word}s?\b")
        assert word in explained and use.search(table) and not use.search(before), word
        assert word == "ordinal" or use.search(after), f"{word}: explained, and not used"
