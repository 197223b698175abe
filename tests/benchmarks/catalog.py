"""All cases that are timed in pairs, in the order of their rows."""

import attention
import engine
import products
import row_work
import training
from cases import Case

CASES: list[Case] = sorted(
    [*products.CASES, *row_work.CASES, *attention.CASES, *training.CASES, *engine.CASES],
    key=lambda case: int(case.row[1:]),
)
