"""Model plug-ins: each folder implements ``core.protocols.Policy`` as an entry point.

Read ``pretrained`` (how a policy is loaded), ``files`` (checkpoints, never executed) and
``config_file`` (sizes, checked before anything is built), then a folder. What several models need
stands here; a model may not import another. transformers is imported only to build a network.
"""
