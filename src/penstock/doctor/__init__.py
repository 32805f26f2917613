"""`penstock doctor`: examine all ranks and the links between them, and say what to fix.

facts       what one rank knows of itself and its host
links       latency and bandwidth between two ranks
survey      all ranks together: facts, clocks, links
advice      problems in a survey, and what to do about them
"""
