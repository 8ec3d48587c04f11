import json, sys, math, torch, torch.nn.functional as F
import ring_la
from ring_la.kernels.protocol import Inputs
from ring_la.kernels.wy import gdn_launches as G
from benchmarks.ops.kda_hopper import graph_ms
dev="cuda"
def make(T,hk,hv,n,gate="qla",seed=0):
    torch.manual_seed(seed)
    q,k=[F.normalize(torch.randn(1,T,hk,128,device=dev),dim=-1).bfloat16() for _ in range(2)]
    v=torch.randn(1,T,hv,128,device=dev).bfloat16()
    g=F.logsigmoid(torch.randn(1,T,hv,device=dev))/16
    if gate=="qla":
        m=torch.zeros(hv,dtype=torch.bool); m[:math.ceil(.75*hv)]=True; m=m[torch.randperm(hv)].to(dev); g[:,:,~m]=0
    elif gate=="strong": g=g*16
    elif gate=="hard": g=-30*torch.rand_like(g)
    elif gate=="zero": g=g*0
    beta=torch.randn(1,T,hv,device=dev).sigmoid(); S0=torch.randn(n,hv,128,128,device=dev)
    return q,k,v,g,beta,S0
def rel(a,b): return float((a.double()-b.double()).norm()/b.double().norm())
def inp(q,k,v,g,beta): return Inputs(q=q,k=k,v=v,g=g,beta=beta)
print(Inputs._fields if hasattr(Inputs,'_fields') else Inputs.__dataclass_fields__.keys())
out=[]
for gate in ("qla","strong","hard","zero"):
    for (T,hk,hv,cus) in ((300,2,4,None),(300,4,4,(0,1,1,130,257,300,300)),(700,1,2,None)):
        for span,G.AHEAD in ((64,0),(64,1),(128,1),(2048,1)):
            G.SPAN=span; G.multiprocessors=lambda d: 10**6
            n=1 if cus is None else len(cus)-1
            q,k,v,g,beta,S0=make(T,hk,hv,n,gate)
            cu=None if cus is None else torch.tensor(cus,dtype=torch.int32,device=dev)
            ref=ring_la.reference.gated_delta_rule(*[x.double() for x in (q,k,v,g,beta)],initial_state=S0.double(),output_final_state=True,cu_seqlens=cu)
            old=ring_la.gated_delta_rule(q,k,v,g,beta,initial_state=S0,output_final_state=True,cu_seqlens=cu)
            o,S=G.forward(inp(q,k,v,g,beta),cu,128**-.5,S0,True); torch.cuda.synchronize()
            S=S.reshape(ref.final_state.shape)
            row=dict(gate=gate,T=T,cu=cus is not None,span=span,o=rel(o,ref.o),S=rel(S,ref.final_state),old_o=rel(old.o,ref.o),old_S=rel(old.final_state,ref.final_state))
            out.append(row)
            if span==64 or row["o"]>5e-3: print(json.dumps(row),flush=True)
from ring_la.kernels.wy import kda_launches
for gate in ("qla","zero","strong"):
  for (hk,hv),lens in (((16,32),[32768]),((32,32),[32768]),((16,64),[32768]),((16,32),[8192]),((16,32),[4096]*8),((16,32),[2048]),((16,32),[1024]*8),((4,8),[8192]),((4,8),[32768]),((2,8),[32768]),((16,32),[131072])):
    if gate!="qla" and lens[0] not in (32768,4096): continue
    T=sum(lens); n=len(lens); q,k,v,g,beta,S0=make(T,hk,hv,n,gate)
    cu=torch.tensor([0]+lens,device=dev,dtype=torch.int32).cumsum(0).int() if n>1 else None
    row=dict(gate=gate,h=(hk,hv),lens=(lens[0],n))
    with torch.no_grad():
        old=graph_ms(lambda: ring_la.gated_delta_rule(q,k,v,g,beta,initial_state=S0,output_final_state=True,cu_seqlens=cu))
        row["old"]=old
        for span in (1024,2048,4096,1<<20):
          for G.AHEAD in ((0,1) if span<1<<20 else (0,)):
            G.SPAN=span
            row[f"{span} {G.AHEAD}"]=graph_ms(lambda: G.forward(inp(q,k,v,g,beta),cu,128**-.5,S0,True))
        G.SPAN=2048
        o,S=G.forward(inp(q,k,v,g,beta),cu,128**-.5,S0,True); ref=ring_la.gated_delta_rule(q,k,v,g,beta,initial_state=S0,output_final_state=True,cu_seqlens=cu)
        row["diff"]=rel(o,ref.o)
    out.append(row); print(json.dumps(row),flush=True)
import os; json.dump(out,open(os.environ.get("OUT",".")+"/gdn.json","w"))
