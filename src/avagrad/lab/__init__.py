"""The paper's experiments: tasks, models, methods, and a training run that can be trusted.

The trainer and the tasks need torch and numpy alone (the digits: scikit-learn, too), so they run where nothing else
is installed: ``python -m avagrad.lab.train digits --optimizer avagrad``.
"""
