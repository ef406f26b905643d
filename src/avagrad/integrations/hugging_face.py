"""A callback for Hugging Face's Trainer."""

from typing import Any

from transformers import TrainerCallback

from avagrad.integrations.metrics import check_every, metrics_of

__all__ = ["HuggingFaceCallback"]


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Logs gamma, the size of a step, and the shares of inactive and clamped coordinates every ``every`` steps.

    They are logged like the Trainer's own numbers. Add the callback after the Trainer is made::

        trainer.add_callback(HuggingFaceCallback(trainer, every=100))

    >>> HuggingFaceCallback(None, every=100).every
    100
    """

    def __init__(self, trainer: Any, every: int = 100) -> None:
        self.trainer, self.every = trainer, check_every(every)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the numbers every ``every`` steps; if parameters are sharded, all ranks compute them together."""
        if state.global_step % self.every == 0 and (found := metrics_of(kwargs.get("optimizer"))):
            should_log = control.should_log
            self.trainer.log(found)
            control.should_log = should_log  # log() resets it, but the Trainer has not logged its loss yet
