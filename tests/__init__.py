"""Tests of pb_kvcache, and the independent references that they compare it with."""
