class KernelTimes: pass
