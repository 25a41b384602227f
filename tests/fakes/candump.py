"""Frames as candump prints them."""

from can_train_tasks.can.data.graphs import Frames


def candump(frames: Frames, style: str = "-L") -> str:
    """Writes frames, IDs cut to 11 bits, as `candump -L`, `-ta`, `-td` or, without times, `` does."""
    lines, before = [], float(frames.timestamp[0]) if len(frames) else 0.0
    for time, can_id, data in zip(frames.timestamp, frames.can_id & 0x7FF, frames.payload, strict=True):
        screen = f"  can0  {can_id:03X}   [{len(data)}]  {bytes(data).hex(' ').upper()}\n"
        if style == "-L":
            lines.append(f"({time:.6f}) can0 {can_id:03X}#{bytes(data).hex().upper()}\n")
        elif style == "-ta":
            lines.append(f" ({time:.6f}){screen}")
        elif style == "-td":
            lines.append(f" ({time - before:010.6f}){screen}")
        else:
            lines.append(screen)
        before = time
    return "".join(lines)
