"""Build or serve the site of README.md and docs/, and make its pages that are no files of docs/.

    python docs/site_pages.py build   write build/site; any warning is an error
    python docs/site_pages.py serve   show it on http://127.0.0.1:8000 and follow changes

MkDocs calls the functions `on_…` (mkdocs.yml, `hooks`). Pages that it gets from here: README.md and the other pages of
the root, one page for each command, the public names of the package, the notebooks of docs/ with their outputs, and
every source file that a page links to.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
ADDRESS = "127.0.0.1:8000"
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Where the pages of the root are on the site."""
API_PAGES = {
    "functions": "train max_batch search compare plan explain estimate watch Watch load_workload",
    "workload": "Workload Metric",
    "amp-step": "TrainStep StepTotals EvalStep EvalTotals float32_precision Precision "
    "ScaleHistory ScaleChanges ScaleReport",
    "integrations": "integrations.lightning.max_batch integrations.transformers.max_batch "
    "integrations.accelerate.watch",
    "results": "MaxBatchResult SearchResult CompareResult TrainResult PlanResult ExplainResult Estimate "
    "Job JobResult JobStatus",
    "errors": "AmpTrackError BadInput BadOption NothingFits PlanMoved StoreFailed TargetFailed",
}
"""By page, the public names that it describes."""
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sbatch": "bash"}
_CODE_OR_LINK = re.compile(
    r"^ *(?P<fence>`{3,}).*?^ *(?P=fence) *$"  # a block of code, and code in a line: not to be changed
    r"|`(?:[^`\n]|\n(?!\n))+`"
    r"|\[(?P<text>[^][]*)\]\((?![a-z]+:|#)(?P<link>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"^<!-- \[\[\[.*\]\]\] -->$", re.MULTILINE)


# ----------------------------------------------------------------------------------------------------- called by MkDocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    pages = {site: (ROOT / name).read_text() for name, site in ROOT_PAGES.items()}
    written = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    written |= {name: pages[site] for name, site in ROOT_PAGES.items()}
    sources = sorted({target for page, text in written.items() for target in _linked_sources(text, page)})
    for name, site in ROOT_PAGES.items():
        pages[site] = _for_the_site(pages[site], page=name, site=site)
    pages |= {f"commands/{name}.md": text for name, text in _command_pages().items()}
    pages |= {f"api/{name}.md": _api_page(name, names.split()) for name, names in API_PAGES.items()}
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        pages[f"{notebook.stem}.md"], images = _notebook_page(notebook)
        for name, image in images.items():
            files.append(_generated(config, name, image))
    for uri, text in pages.items():
        files.append(_generated(config, uri, text))
    for source in sources:
        files.append(_generated(config, _site_path(source), _source_page(source), is_in_nav=False))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page of docs/ without cog's markers, and with its links to other folders led to their pages."""
    if page.file.generated_by:
        return markdown
    return _for_the_site(markdown, page=f"docs/{page.file.src_uri}", site=page.file.src_uri)


# -------------------------------------------------------------------------------------------------------------- pages


def _generated(config: MkDocsConfig, uri: str, content: str | bytes, *, is_in_nav: bool = True) -> File:
    from mkdocs.structure.files import File, InclusionLevel

    inclusion = InclusionLevel.INCLUDED if is_in_nav else InclusionLevel.NOT_IN_NAV
    return File.generated(config, uri, content=content, inclusion=inclusion)


def _command_pages() -> dict[str, str]:
    """Return a page for each command: its help, and its flags by panel."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # here, because MkDocs resets the path after it has imported hooks
    import generate

    return {name: generate.command_page(name) for name in generate.COMMANDS}


def _api_page(title: str, names: list[str]) -> str:
    heading = f"# Python: {title.replace('-', ' ').replace('amp', 'AMP')}"
    in_full = "\n    options:\n      show_root_full_path: true"  # two integrations have a function of one name
    described = [f"::: amp_track.{name}{in_full if '.' in name else ''}" for name in names]
    return "\n\n".join([heading, *described]) + "\n"


def _notebook_page(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, with its outputs as they are stored, and its images by address."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"images/{notebook.stem}-{len(images) + 1}.png"
                images[name] = base64.b64decode(data["image/png"])
                parts.append(f"![output]({name})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                shown = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{shown}\n```")
    markdown = "\n\n".join(parts) + "\n"
    return _for_the_site(markdown, page=f"docs/{notebook.name}", site=f"{notebook.stem}.md"), images


def _source_page(source: str) -> str:
    path = ROOT / source
    if path.suffix == ".md":
        return _for_the_site(path.read_text(), page=source, site=_site_path(source))
    return f"# {source}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


# -------------------------------------------------------------------------------------------------------------- links


def _linked_sources(markdown: str, page: str) -> set[str]:
    """Return the files outside docs/ that a page links to, from the root."""
    targets = {_target(found["link"], page) for found in _CODE_OR_LINK.finditer(markdown) if found["link"]}
    return {target for target in targets if target not in ROOT_PAGES and not _is_in_docs(target) and _is_file(target)}


def _for_the_site(markdown: str, *, page: str, site: str) -> str:
    """Return a page of the repository as one of the site: relative links lead to where their files are there."""

    def relinked(found: re.Match[str]) -> str:
        if found["link"] is None:
            return found[0]
        target = _target(found["link"], page)
        if (ROOT / target).is_dir():
            return found["text"]  # a folder has no page
        path = posixpath.relpath(_site_path(target), posixpath.dirname(site) or ".")
        return f"[{found['text']}]({path}{found['anchor'] or ''})"

    return _CODE_OR_LINK.sub(relinked, _MARKER.sub("", markdown))


def _target(link: str, page: str) -> str:
    """Return the file that a link of a page leads to, from the root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _site_path(target: str) -> str:
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if _is_in_docs(target):
        return target.removeprefix("docs/").replace(".ipynb", ".md")
    shown = target.lstrip(".")  # MkDocs leaves out files that begin with a dot
    return f"files/{shown}" if shown.endswith(".md") else f"files/{shown}.md"


def _is_in_docs(target: str) -> bool:
    return target.startswith("docs/") and not target.endswith(".py")


def _is_file(target: str) -> bool:
    return (ROOT / target).is_file()


# -------------------------------------------------------------------------------------------------------- command line


def main(arguments: list[str]) -> int:
    """Build or serve the site; 2 if MkDocs is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")):
        print("The site needs MkDocs with Material and mkdocstrings: pip install '.[site]'.", file=sys.stderr)
        return 2
    from mkdocs.__main__ import cli

    flags = {"build": ["--strict", "--clean"], "serve": ["--dev-addr", ADDRESS]}
    if arguments not in [[name] for name in flags]:
        print(f"usage: python docs/site_pages.py {' | '.join(flags)}", file=sys.stderr)
        return 2
    command: Any = cli
    done = command(
        [arguments[0], *flags[arguments[0]], "--config-file", str(ROOT / "mkdocs.yml")], standalone_mode=False
    )
    return int(done or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
