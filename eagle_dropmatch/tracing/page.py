"""A trace as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ..errors import UserError
from .data import as_json


def require_jinja2() -> None:
    """UserError where the page could not be written: better before the models are loaded."""
    if importlib.util.find_spec("jinja2") is None:
        raise UserError("the page needs jinja2: run `pip install eagle-dropmatch[trace]`")


def render_page(data: Mapping[str, Any]) -> str:
    """The page of ``data.page_data``'s answer."""
    import jinja2
    from markupsafe import Markup

    files = resources.files(__package__) / "assets"

    def own(name: str) -> str:
        return (files / name).read_text(encoding="utf-8")

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(own("page.html")).render(
        rules=[trace["rule"] for trace in data["traces"]],
        header=data["header"],
        css=Markup(own("page.css")),
        script=Markup(own("page.js")),
        data=Markup(script_safe(as_json(data))),
    )


def script_safe(json_text: str) -> str:
    """JSON that says the same and that no HTML parser can leave its script element in.

    Models write ``</script>`` and ``<!--`` like anything else; in JSON these characters stand only
    in strings, where they may be escaped.
    """
    for character in "<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return json_text
