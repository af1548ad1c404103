"""A figure of matplotlib that keeps the style of opgrip's pictures, wherever a program shows or saves it."""

from __future__ import annotations

import base64
import io
from typing import Any

from matplotlib.figure import Figure

from opgrip.display.figures import in_style

DOTS_PER_INCH, PIXELS_PER_INCH = 150, 100
"""Of an image on a page, and of the page: screens have more dots than pages have pixels."""


class StyledFigure(Figure):
    """A figure that is drawn in one style, and that Jupyter shows as an image, with or without pyplot."""

    def savefig(self, *args: Any, **options: Any) -> None:
        """Write it to a file, as matplotlib does."""
        with in_style():
            super().savefig(*args, **options)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        png, width = png_of(self)
        return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"width": width}}


def png_of(figure: Figure) -> tuple[str, int]:
    """An image of a figure in base64, and the width that it is shown with, in pixels of a page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH, pil_kwargs={"optimize": True})
    return base64.b64encode(file.getvalue()).decode(), round(figure.get_size_inches()[0] * PIXELS_PER_INCH)
