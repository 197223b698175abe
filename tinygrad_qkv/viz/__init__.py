"""Pictures: pure functions that return what they drew.

`draw_graph` draws the computation graph that made a tensor, `attention_map` a heat map as SVG, and `attention_text`
the same for a terminal.
"""

from tinygrad_qkv.viz.graph import draw_graph
from tinygrad_qkv.viz.maps import attention_map
from tinygrad_qkv.viz.text import attention_text

__all__ = ["attention_map", "attention_text", "draw_graph"]
