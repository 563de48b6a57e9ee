"""Cosmos 3 around diffusers' `Cosmos3OmniTransformer`: what its training and serving stages share.

In the order in which data flows: `sequence` (samples and their packing), `attention` (keeps packed samples
apart), `model` (the transformer on packed samples), `objective` (flow matching).
"""
