"""A matplotlib figure that keeps opgrip's style wherever a program shows or saves it."""

from __future__ import annotations

import base64
import io
from typing import Any

from matplotlib.figure import Figure

from opgrip.display.figures import in_style

# resolution of an image, and of the page that shows it; a higher resolution looks sharp on screens
DOTS_PER_INCH, PIXELS_PER_INCH = 150, 100


class StyledFigure(Figure):
    """A matplotlib figure that is always drawn in opgrip's plot style, and that Jupyter shows as an image."""

    def savefig(self, *args: Any, **options: Any) -> None:
        with in_style():
            super().savefig(*args, **options)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        png, width = png_of(self)
        return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"width": width}}


def png_of(figure: Figure) -> tuple[str, int]:
    """Return a figure as a .png image in base64, and the width in page pixels at which a notebook shows it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH, pil_kwargs={"optimize": True})
    return base64.b64encode(file.getvalue()).decode(), round(figure.get_size_inches()[0] * PIXELS_PER_INCH)
