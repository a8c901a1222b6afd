"""Small models on images: a Gaussian policy with proprioception, and a success classifier.

Read ``options``, ``policy``, ``encoder``; ``classifier`` is a reward plug-in, here for the
encoder's sake.
"""
