"""The gradient ledger: what `loss.backward(trace=True)` returns."""

from tinygrad_qkv.ledger.entry import Entry, Factor
from tinygrad_qkv.ledger.ledger import Ledger

__all__ = ["Entry", "Factor", "Ledger"]
