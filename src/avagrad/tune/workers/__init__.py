"""Worker pools: this process, with points one by one or all at once; processes on this machine; a Ray cluster.

Workers take points from the study themselves, so any number of machines can join. A pool supervises its workers: it
replaces those that die and kills those that take too long for a point. They end when the process of the pool does.
"""
