"""Bytes and seconds as a person reads them."""


def spoken_bytes(n: int | float) -> str:
    """A number of bytes: 980 bytes, 14.2 GB (powers of ten)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "bytes" or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:,.1f} TB"


def spoken_seconds(seconds: int | float) -> str:
    """A time: 12 s, 45 min, 2 h 10 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60:,} h {minutes % 60} min"
