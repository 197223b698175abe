"""`detect_anomaly()`: the first op or rule that makes a NaN or an inf, and why."""

from tinygrad_qkv.anomaly.detection import detect_anomaly
from tinygrad_qkv.anomaly.report import AnomalyError

__all__ = ["AnomalyError", "detect_anomaly"]
