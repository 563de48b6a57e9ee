"""Files, times and sizes as the report writes them."""

import base64
import mimetypes
from pathlib import Path


def data_uri(path: Path) -> str:
    """The file's content as a data: address."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def duration(seconds: float) -> str:
    """`4.2 s`, `48 s`, `7 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def size(count: int) -> str:
    """Bytes in binary units, to three digits."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"
