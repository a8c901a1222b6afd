"""Any causal language model of transformers as a policy. The entry point names ``CausalLMPolicy``.

Read ``options``, ``vocabulary`` (which tokens may be written), ``policy``.
"""
