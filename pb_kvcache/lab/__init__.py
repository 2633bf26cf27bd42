"""What measures: attention traces, their replay through policies, the benchmark, evaluations, and their pages.

- :mod:`pb_kvcache.lab.traces`: attention to replay, synthetic or recorded.
- :mod:`pb_kvcache.lab.record`: a decoder's attention as a trace (extra ``transformers``).
- :mod:`pb_kvcache.lab.replay`: one trace through one policy, and what the policy kept.
- :mod:`pb_kvcache.lab.bench`: one trace through many policies at equal total memory.
- :mod:`pb_kvcache.lab.tasks`: prompts whose answers are known, for judging what eviction costs.
- :mod:`pb_kvcache.lab.findings`: what a benchmark's figures say, in sentences.
- :mod:`pb_kvcache.lab.page`: a benchmark as one HTML page with plots (extra ``bench``).
- :mod:`pb_kvcache.lab.verdict`: what an evaluation's rows say, with intervals, in tables and sentences.
- :mod:`pb_kvcache.lab.evaluation_files`, :mod:`pb_kvcache.lab.evaluation_page`: an evaluation as files, and as one HTML
  page with plots (extra ``plot``).

>>> from pb_kvcache.lab import bench, traces
>>> from pb_kvcache.lab.replay import replay
"""
