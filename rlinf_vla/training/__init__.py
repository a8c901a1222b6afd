"""Optimiser steps, LoRA, data-parallel and sharded training, replay and checkpoints."""
