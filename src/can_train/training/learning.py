"""stub"""
from dataclasses import dataclass
@dataclass
class Factor:
    value: float
    reason: str
def factor_for(run, meter): return Factor(0.6,"stub")
class Attempt:
    def __init__(self,*a): pass
    def __enter__(self): return self
    def __exit__(self,*a): return None
