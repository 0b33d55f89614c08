"""Answers that are printed: reports, comparisons, benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Printed:
    """What shows itself as text and tables: `print(x)` without colours, a console of rich with them.

    A subclass has `rendered`. It imports what makes its tables there, and not at the top of its module: rich takes
    longer to import than a small model to compile from the cache, and most programs print nothing.
    """

    text_width: ClassVar[int] = 120  # columns of `str(x)`

    def rendered(self, width: int) -> Iterable[Any]:
        """Texts and tables of rich, for a terminal of so many columns."""
        raise NotImplementedError

    def __str__(self) -> str:
        from onnxc.reports.terminal import as_text  # it imports rich

        return as_text(self, self.text_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.rendered(options.max_width)
