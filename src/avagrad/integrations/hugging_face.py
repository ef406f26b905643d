"""A callback for Hugging Face's Trainer."""

from typing import Any

from transformers import TrainerCallback

from avagrad.integrations.metrics import check_every, metrics_of

__all__ = ["HuggingFaceCallback"]


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Logs gamma, the size of a step, and the shares of inactive and clamped coordinates every ``every`` steps.

    They go where the Trainer's own numbers go. Add it to the Trainer after that is made::

        trainer.add_callback(HuggingFaceCallback(trainer, every=100))

    >>> HuggingFaceCallback(None, every=100).every
    100
    """

    def __init__(self, trainer: Any, every: int = 100) -> None:
        self.trainer, self.every = trainer, check_every(every)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the numbers, if it is time; where parameters are sharded, all ranks work them out together."""
        if state.global_step % self.every == 0 and (found := metrics_of(kwargs.get("optimizer"))):
            asked = control.should_log
            self.trainer.log(found)
            control.should_log = asked  # which log() withdraws: the Trainer is still to log its loss
