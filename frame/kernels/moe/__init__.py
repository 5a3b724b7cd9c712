"""Routing, token alignment and grouped GEMM of mixture-of-experts layers."""
