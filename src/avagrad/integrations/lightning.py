"""A callback for Lightning."""

from typing import Any

from lightning.pytorch.callbacks import Callback

from avagrad.integrations.metrics import check_every, metrics_of

__all__ = ["LightningCallback"]


class LightningCallback(Callback):  # type: ignore[misc]  # lightning is not followed
    """Logs gamma, the size of a step, and the shares of inactive and clamped coordinates every ``every`` steps.

    They go to the Trainer's loggers, at its ``global_step``, with the optimizer's index if there are several::

        Trainer(callbacks=[LightningCallback(every=100)])

    >>> LightningCallback(every=100).every
    100
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        self.every, self._last = check_every(every), 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from the step at which this run starts."""
        self._last = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **kwargs: Any) -> None:
        """Log the numbers every ``every`` steps; if parameters are sharded, all ranks compute them together."""
        step, last = trainer.global_step, self._last
        self._last = step
        if step // self.every == last // self.every:
            return  # several optimizers may skip over a multiple; none steps while gradients are accumulated
        several = len(trainer.optimizers) > 1
        for i, optimizer in enumerate(trainer.optimizers):
            found = metrics_of(optimizer, prefix=f"optimizer_{i}/" if several else "optimizer/")
            for logger in trainer.loggers if found and trainer.is_global_zero else []:
                logger.log_metrics(found, step=step)
