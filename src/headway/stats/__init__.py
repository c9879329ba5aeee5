"""The statistics that metrics and gates stand on.

What every pytest run may load stands here. The modules `intervals`, `pairs`, `flips`, `signed_rank`
and `nights` bring in numpy or scipy: import them where they are used, inside functions.
"""

from headway.stats.summary import (
    Prediction,
    mean,
    median,
    min_samples,
    percentile,
    predict_log,
    student,
)

__all__ = ["Prediction", "mean", "median", "min_samples", "percentile", "predict_log", "student"]
