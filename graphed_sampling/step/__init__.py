"""The asynchronous step: the GPU's work and the CPU's apart, and the event loop free.

futures.py   gpu_future: a stream's work as a future of asyncio
ring.py      outputs on their way to the host
loop.py      StepLoop: plan, enqueue, bookkeep
batch.py     what it asks of forward
requests.py  a request as its caller and the loop see it
reports.py   a step's output, row by row
clock.py     the device's times
text.py      tokens to text, stop strings
trace.py     what happened when
"""
