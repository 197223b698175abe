"""Pictures: pure functions that return what they drew.

`draw_graph` draws the computation graph that made a tensor, `attention_map` a heat map as SVG, and `attention_text`
the same for a terminal.
"""

from tinygrad_qkv.viz.graph import draw_graph

__all__ = ["draw_graph"]
