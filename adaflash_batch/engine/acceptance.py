"""temp"""
from __future__ import annotations
from dataclasses import dataclass, field
_SPAN=400.0
@dataclass(slots=True)
class RequestRecord:
    reached: float = 0.0
    right: float = 0.0
    expected: float = 0.0
class AcceptanceHistory:
    def __init__(self)->None:
        self._reached: list[float]=[]; self._right: list[float]=[]
    def observe(self, record, accepted:int, known:int)->None:
        keep=1-1/_SPAN
        for i in range(min(accepted+1,known)):
            if i>=len(self._reached): self._reached.append(0.0); self._right.append(0.0)
            self._reached[i]=self._reached[i]*keep+1; self._right[i]=self._right[i]*keep+(i<accepted)
            if record is not None:
                record.reached+=1; record.right+=i<accepted; record.expected+=self._rate(i)
    def _rate(self,i:int)->float:
        if i>=len(self._reached): return 0.8
        return (self._right[i]+0.8*4)/(self._reached[i]+4)
    def survival(self, record, num_drafts:int)->list[float]:
        k=1.0
        if record is not None: k=(record.right+16*.7)/(record.expected+16*.7)
        out=[];s=1.0
        for i in range(num_drafts):
            s*=min(self._rate(i)*k,0.98); out.append(s)
        return out
    def expect_change(self)->None:
        self._reached=[x*.1 for x in self._reached]; self._right=[x*.1 for x in self._right]
class Calibration:
    def __init__(self)->None:
        self.total=0; self._n=[0]*10; self._p=[0.0]*10; self._h=[0]*10
    def observe(self,predicted:float,happened:bool)->None:
        b=min(int(predicted*10),9); self.total+=1; self._n[b]+=1; self._p[b]+=predicted; self._h[b]+=happened
    @property
    def ece(self)->float|None:
        return sum(abs(p-h) for p,h in zip(self._p,self._h))/self.total if self.total else None
    def curve(self)->list:
        return [[n,p/n,h/n] for n,p,h in zip(self._n,self._p,self._h) if n]
