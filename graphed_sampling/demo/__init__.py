"""The demo: a small language model answers many prompts at once, each with its own parameters.

checkpoint.py  the model file, read
tokenizer.py   text to token ids and back
llama.py       the model and its key-value cache
engine.py      continuous batching over `RequestTable` and `GraphedSampler`
prompts.py     the built-in requests
screen.py      the terminal
run.py         all of it together
"""
