/* The clock of the first GPU, from NVML. */
#ifndef FATTNI_CLI_MEASURE_DEVICE_CLOCK_H
#define FATTNI_CLI_MEASURE_DEVICE_CLOCK_H

/* Current MHz of the multiprocessors; 0 without NVML or a device. */
int device_clock(void);

#endif
