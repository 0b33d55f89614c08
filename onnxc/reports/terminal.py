"""Text for a terminal: what a model calls its tensors and nodes is shown, and never obeyed."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from onnxc.errors import one_line, spelled


class SafeConsole(Console):
    """A console that spells out control characters, and those that change the direction of text. Of a closed pipe it
    raises BrokenPipeError, as other writers do.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads what is printed")

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable() or text == "\n":
                yield segment
            else:
                yield Segment("\n".join(map(spelled, text.split("\n"))), segment.style)


def as_line(text: str, style: str = "") -> Text:
    """A line or a cell with names in it: they are no markup, stay on their line, and have no more than its room."""
    return Text(one_line(text), style)


def as_text(renderable: Any, width: int = 120) -> str:
    """What a console prints, without colours and trailing spaces."""
    console = SafeConsole(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())
