"""The demo: a small language model answers many prompts at once, each with its own parameters.

model.py    the model, read and run by transformers over a cache with one slot per request
engine.py   the model as `forward` of a `StepLoop`, requests and their answers
prompts.py  the built-in requests
screen.py   the terminal
run.py      all of it together
server.py   OpenAI's /v1/completions over any `StepLoop`; serve.py has it over the demo's model

random_model.py has a model of any shape with random weights, trace.py what a loop does when.
"""
