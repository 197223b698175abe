"""What a first run says on stderr while it compiles kernels.

One line stays, once compiling has taken over a second in all. On a terminal the kernel at work stands below it, in a
line that vanishes when the kernel is done; elsewhere each kernel that took over a second leaves a line.
"""

import sys

LONG = 1.0  # seconds
silent = False  # True where somebody else shows the progress

_kernels = 0
_seconds = 0.0
_told = False
_shown = ""  # what stands in the terminal's vanishing line


def begin(label: str) -> None:
    """Note that a kernel is being compiled."""
    if not silent and _on_terminal():
        _show(f"tinygrad_qkv: compiling kernel {_kernels + 1}, {label} ...")


def end(label: str, seconds: float, folder: str | None) -> None:
    """Note that a kernel is compiled, and will be kept in the folder, if there is one."""
    global _kernels, _seconds, _told
    _kernels += 1
    _seconds += seconds
    if silent:
        return
    _show("")
    if _seconds > LONG and not _told:
        _told = True
        keep = f"later runs load them from {folder}" if folder else "no cache folder can be written, so every run does"
        _say(f"tinygrad_qkv: compiling numerical kernels for this machine; {keep}\n")
    if seconds > LONG and not _on_terminal():
        _say(f"tinygrad_qkv: compiled {label} in {seconds:.1f} s\n")


def _on_terminal() -> bool:
    # A stream put in place of stderr, such as that of a progress bar, counts lines and must not see one redrawn.
    stream = sys.stderr
    if stream is None or stream.closed:
        return False
    return stream.isatty() and stream is sys.__stderr__


def _show(text: str) -> None:
    """Put the text into the vanishing line, by blanks and carriage returns, which every terminal understands."""
    global _shown
    text = text[:79]
    if text != _shown:
        _say("\r" + " " * len(_shown) + "\r" + text)
        _shown = text


def _say(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # a program without stderr computes all the same
        return
