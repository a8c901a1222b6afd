"""Workers on a Ray cluster, which may be lost at any moment, and the trainer's ranks.

May enter: what several processes need; an algorithm must not notice. Ray is imported inside
functions, because it reads variables that cluster sets first. Read open (what is started), cluster
(places), pool (losses), trainers, publisher. What a worker does is in ``runtime/workers``.
"""
