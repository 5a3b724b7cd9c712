"""Products of low-rank deltas of many adapters in one batch (Punica's SGMV, arXiv 2310.18547).

Used by `frame.adapters.triton_deltas`. Must not know adapters, requests or layers.
"""
