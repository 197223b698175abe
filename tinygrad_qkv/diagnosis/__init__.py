"""`diagnose(model, loss)`: does every parameter learn, and if not, why not."""

from tinygrad_qkv.diagnosis.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
