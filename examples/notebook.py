# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # A learning rate that stays
#
# This notebook trains a small network on digits with AdamW and with AvaStep, changes eps, tunes lr and eps in about 16
# trials, and draws the map. It takes less than a minute on a laptop and downloads nothing.
#
# It is a plain Python file. To open it in Jupyter: `jupytext --to notebook examples/notebook.py`. It needs
# `pip install '.[lab]'`.

# %%
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  (so that Jupyter shows figures)
import torch
from sklearn.datasets import load_digits
from torch import nn

import avagrad
from avagrad.report.drawing import save
from avagrad.report.figures.heat_maps import draw_heat_maps, heat_map
from avagrad.tune import Trial, tune
from avagrad.tune.ridges import ridge

torch.set_num_threads(1)  # the network is tiny: more threads only wait for each other

# %% [markdown]
# ## The training
#
# 1,797 images of 8 x 8 pixels: 1,200 to train on, the others to validate on. `train` returns the validation loss. It is
# an ordinary training loop; the optimizer is made by its name.

# %%
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
training, validation = order[:1200], order[1200:]


def train(name: str, lr: float, eps: float, seed: int = 0, epochs: int = 12) -> float:
    """Train a small network; return its loss on the validation images."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = avagrad.create_optimizer(model, name, lr=lr, eps=eps, weight_decay=0.01)
    for _ in range(epochs):
        for batch in training[torch.randperm(len(training))].chunk(12):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(images[validation]), labels[validation]).item()


# %% [markdown]
# ## AdamW and AvaStep
#
# With the same lr and eps, AvaStep ends about where AdamW does.

# %%
for name in ("adamw", "avastep"):
    print(f"{name:8} lr 0.01, eps 1e-8: {train(name, lr=0.01, eps=1e-8):.3f}")

# %% [markdown]
# ## Another eps
#
# A larger eps makes both methods less adaptive. It also makes AdamW's steps smaller, so that AdamW needs another lr.
# AvaStep's steps keep their size.

# %%
for name in ("adamw", "avastep"):
    for eps in (1e-8, 1e-4, 1.0):
        print(f"{name:8} lr 0.01, eps {eps:<6g}: {train(name, lr=0.01, eps=eps):.3f}")

# %% [markdown]
# ## Tuning
#
# The tuner wants a function of a trial. It runs a line over lr, a line over eps, each from coarse to fine, and the
# neighbours of the best point. Every trial is kept in a file: if this cell is stopped and run again, it continues.

# %%
folder = Path(tempfile.mkdtemp())
axes = {"adamw": "0.01:100:9", "avastep": "1e-3:1:7"}  # of lr: two values in each power of ten
eps_axis = "1e-8:100:11"


def objective(name: str) -> Callable[[Trial], float]:
    """Return the function that the tuner calls."""

    def loss(trial: Trial) -> float:
        assert trial.lr is not None
        assert trial.eps is not None
        return train(name, trial.lr, trial.eps, trial.seed)

    return loss


found = tune(objective("avastep"), lr=axes["avastep"], eps=eps_axis, storage=folder / "avastep.journal")
print(found.summary())

# %% [markdown]
# ## The map
#
# To see what the search could not see, run the whole grid of both methods. The trials that are there already are not
# run again.

# %%
maps = {
    name: tune(objective(name), lr=lr, eps=eps_axis, method="grid", storage=folder / f"{name}.journal").trials
    for name, lr in axes.items()
}
for name, records in maps.items():
    print(f"{name:8} the best lr moves by {ridge(records).spread:.1f} powers of ten over all eps")

figure = draw_heat_maps([heat_map(name, records) for name, records in maps.items()], measure="validation loss")
save(figure, folder / "map.png")
figure

# %% [markdown]
# The line joins the best lr of each eps. AdamW's rises with eps: with another eps it has to be searched again.
# AvaStep's stays in its row. The dotted path is where a search by two full lines goes.
