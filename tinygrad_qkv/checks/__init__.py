"""`check_grad` and the like: derivatives beside finite differences, and the op to blame for a wrong one."""

from tinygrad_qkv.checks.gradient_checks import GradientError, check_grad, check_grad_grad, check_jvp

__all__ = ["GradientError", "check_grad", "check_grad_grad", "check_jvp"]
