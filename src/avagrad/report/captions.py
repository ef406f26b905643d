"""What charts say, in words: sentences that are made from the numbers, whatever these are."""

from collections.abc import Sequence

from avagrad.report.curves import Band, BarGroup, BudgetChart, LearningChart, Start

__all__ = ["told_of_bars", "told_of_budgets", "told_of_figure_1", "told_of_learning"]


def _joined(sentences: Sequence[str]) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def told_of_budgets(chart: BudgetChart) -> str:
    """Say what each search has found when it ends, and what random cells have found for as many trials.

    >>> from avagrad.report.curves import BudgetLine
    >>> search = BudgetLine("Adam", "separable", 0, Band((1.0, 2.0), (5.0, 3.0)))
    >>> told_of_budgets(BudgetChart("digits", "error, %", (search,), False, None))
    'Adam: 3 after 2 trials.'
    """
    sentences = []
    for line in chart.lines:
        end = line.band.last
        if end is None or line.kind == "random":
            continue
        trials, value = end
        beside = [
            y
            for other in chart.lines
            if other.kind == "random" and other.sweep == line.sweep
            for x, y in zip(other.band.x, other.band.middle, strict=True)
            if x == trials and y is not None
        ]
        random = f", where as many random cells have {beside[0]:.4g}" if beside else ""
        sentences.append(f"{line.title}: {value:.4g} after {trials:.0f} trials{random}.")
    return _joined([*sentences, chart.note])


def told_of_learning(chart: LearningChart) -> str:
    """Say which settings have the least validation error at the end.

    >>> from avagrad.report.curves import LearningLine
    >>> line = LearningLine("SGD, lr 0.1", 2, 0, {"error": Band((1.0, 2.0), (50.0, 25.0))})
    >>> told_of_learning(LearningChart("digits", {"error": "validation error, %"}, (line,), frozenset(), 0))
    'Validation error, %, at the end: SGD, lr 0.1: 25.'
    """
    ends = [(end[1], line) for line in chart.lines if (end := line.bands.get("error", Band()).last) is not None]
    ends.sort(key=lambda pair: pair[0])
    named = "; ".join(f"{line.title}: {value:.4g}" for value, line in ends[:3])
    more = f"; {len(ends) - 3} more are above that" if len(ends) > 3 else ""
    diverged = [line.title for line in chart.lines if line.diverged]
    lost = f"Diverged: {'; '.join(diverged)}." if diverged else ""
    quantity = chart.quantities.get("error", "error").capitalize()
    best = f"{quantity}, at the end: {named}{more}." if ends else ""
    return _joined([best, lost, chart.note])


def told_of_figure_1(starts: Sequence[Start]) -> str:
    """Say where each method is at the end, from each start.

    >>> from avagrad.report.curves import SyntheticLine
    >>> line = SyntheticLine("Adam", Band((1.0,), (0.95,)), Band((1.0,), (0.9,)), Band())
    >>> told_of_figure_1([Start(0.0, 0.4995, (line,), "")])
    'From w = 0 (the minimum is at 0.4995), means over time of w and of the squared gradient: Adam 0.950, 0.900.'
    """
    sentences = []
    for start in starts:
        told = [
            f"{line.title} {w[1]:.3f}, {squared[1]:.3f}"
            for line in start.lines
            if (w := line.w.last) is not None and (squared := line.squared_gradient.last) is not None
        ]
        lowest = "" if start.minimiser is None else f" (the minimum is at {start.minimiser:.4f})"
        place = start.title.capitalize() or "In all"
        if told:
            sentences.append(f"{place}{lowest}, means over time of w and of the squared gradient: {'; '.join(told)}.")
    return _joined([*sentences, *dict.fromkeys(start.note for start in starts)])


def told_of_bars(groups: Sequence[BarGroup]) -> str:
    """Say how ours compare with torch's fused AdamW.

    >>> from avagrad.report.curves import Bar
    >>> told_of_bars([BarGroup("resnet50", (Bar("AvaGrad fused", 0.25, 0.5, True),))])
    "Beside torch's fused AdamW: resnet50: AvaGrad fused 0.50."
    """
    told = [
        f"{group.title}: {', '.join(f'{bar.title} {bar.ratio:.2f}' for bar in ours)}"
        for group in groups
        if (ours := [bar for bar in group.bars if bar.is_ours and bar.ratio is not None])
    ]
    return f"Beside torch's fused AdamW: {'; '.join(told)}." if told else ""
