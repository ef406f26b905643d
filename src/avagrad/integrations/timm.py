"""Names for timm's optimizer factory."""

from avagrad.create import OPTIMIZERS

__all__ = ["register_with_timm"]


def register_with_timm() -> list[str]:
    """Register our optimizers for ``timm.optim.create_optimizer_v2`` and timm's ``train.py --opt``.

    Returns the names: those of :func:`avagrad.optimizers` for our own classes, without hyphens. A name that timm has
    already (its own ADOPT) is not replaced. A second call changes nothing.

    >>> register_with_timm()  # doctest: +SKIP
    ['adabound', 'adashift', 'avagrad', 'avagradw', 'avastep', 'delayedadam']
    """
    try:
        from timm.optim import OptimInfo, get_optimizer_class, list_optimizers
        from timm.optim._optim_factory import default_registry
    except ImportError as error:
        raise ImportError(
            f"register_with_timm needs timm, which cannot be imported ({error}): pip install timm."
        ) from error
    names, known = [], set(list_optimizers())
    for name, (make, _) in OPTIMIZERS.items():
        if make.__module__.startswith("torch."):
            continue
        bare = name.replace("-", "")
        if bare in known:
            if get_optimizer_class(bare, bind_defaults=False) is make:
                names.append(bare)
            continue
        description = (make.__doc__ or "").strip().splitlines()[0]
        default_registry.register(
            OptimInfo(name=bare, opt_class=make, description=description, has_betas=True, has_momentum=False)
        )
        names.append(bare)
    return names
