/* Functions of the runtime that are not emulated. They exist so that programs that refer to them start; a call fails
 * with a message.
 */
#include "runtime.h"
#include <stdio.h>

/* clang-format off */
#define MISSING(M) \
    M(cudaArrayGetInfo) M(cudaArrayGetMemoryRequirements) M(cudaArrayGetPlane)                     \
    M(cudaArrayGetSparseProperties) M(cudaChooseDevice)                                            \
    M(cudaCreateSurfaceObject) M(cudaCreateTextureObject) M(cudaDestroyExternalMemory)             \
    M(cudaDestroyExternalSemaphore) M(cudaDestroySurfaceObject) M(cudaDestroyTextureObject)        \
    M(cudaDeviceDisablePeerAccess) M(cudaDeviceEnablePeerAccess)                                   \
    M(cudaDeviceFlushGPUDirectRDMAWrites) M(cudaDeviceGetByPCIBusId)                               \
    M(cudaDeviceGetDefaultMemPool) M(cudaDeviceGetGraphMemAttribute)                               \
    M(cudaDeviceGetHostAtomicCapabilities) M(cudaDeviceGetMemPool)                                 \
    M(cudaDeviceGetNvSciSyncAttributes) M(cudaDeviceGetP2PAtomicCapabilities)                      \
    M(cudaDeviceGetP2PAttribute) M(cudaDeviceGetTexture1DLinearMaxWidth)                           \
    M(cudaDeviceGraphMemTrim) M(cudaDeviceRegisterAsyncNotification)                               \
    M(cudaDeviceSetGraphMemAttribute) M(cudaDeviceSetMemPool)                                      \
    M(cudaDeviceUnregisterAsyncNotification) M(cudaExternalMemoryGetMappedBuffer)                  \
    M(cudaExternalMemoryGetMappedMipmappedArray) M(cudaFreeArray) M(cudaFreeMipmappedArray)        \
    M(cudaGetChannelDesc) M(cudaGetExportTable) M(cudaGetMipmappedArrayLevel)                      \
    M(cudaGetSurfaceObjectResourceDesc) M(cudaGetTextureObjectResourceDesc)                        \
    M(cudaGetTextureObjectResourceViewDesc) M(cudaGetTextureObjectTextureDesc)                     \
    M(cudaGraphAddChildGraphNode) M(cudaGraphAddDependencies) M(cudaGraphAddDependencies_v2)       \
    M(cudaGraphAddEmptyNode) M(cudaGraphAddEventRecordNode) M(cudaGraphAddEventWaitNode)           \
    M(cudaGraphAddExternalSemaphoresSignalNode) M(cudaGraphAddExternalSemaphoresWaitNode)          \
    M(cudaGraphAddHostNode) M(cudaGraphAddKernelNode) M(cudaGraphAddMemAllocNode)                  \
    M(cudaGraphAddMemFreeNode) M(cudaGraphAddMemcpyNode) M(cudaGraphAddMemcpyNode1D)               \
    M(cudaGraphAddMemcpyNodeFromSymbol) M(cudaGraphAddMemcpyNodeToSymbol)                          \
    M(cudaGraphAddMemsetNode) M(cudaGraphAddNode) M(cudaGraphAddNode_v2)                           \
    M(cudaGraphChildGraphNodeGetGraph) M(cudaGraphClone) M(cudaGraphConditionalHandleCreate)       \
    M(cudaGraphCreate) M(cudaGraphDebugDotPrint) M(cudaGraphDestroy) M(cudaGraphDestroyNode)       \
    M(cudaGraphEventRecordNodeGetEvent) M(cudaGraphEventRecordNodeSetEvent)                        \
    M(cudaGraphEventWaitNodeGetEvent) M(cudaGraphEventWaitNodeSetEvent)                            \
    M(cudaGraphExecChildGraphNodeSetParams) M(cudaGraphExecDestroy)                                \
    M(cudaGraphExecEventRecordNodeSetEvent) M(cudaGraphExecEventWaitNodeSetEvent)                  \
    M(cudaGraphExecExternalSemaphoresSignalNodeSetParams)                                          \
    M(cudaGraphExecExternalSemaphoresWaitNodeSetParams) M(cudaGraphExecGetFlags)                   \
    M(cudaGraphExecHostNodeSetParams) M(cudaGraphExecKernelNodeSetParams)                          \
    M(cudaGraphExecMemcpyNodeSetParams) M(cudaGraphExecMemcpyNodeSetParams1D)                      \
    M(cudaGraphExecMemcpyNodeSetParamsFromSymbol) M(cudaGraphExecMemcpyNodeSetParamsToSymbol)      \
    M(cudaGraphExecMemsetNodeSetParams) M(cudaGraphExecNodeSetParams) M(cudaGraphExecUpdate)       \
    M(cudaGraphExternalSemaphoresSignalNodeGetParams)                                              \
    M(cudaGraphExternalSemaphoresSignalNodeSetParams)                                              \
    M(cudaGraphExternalSemaphoresWaitNodeGetParams)                                                \
    M(cudaGraphExternalSemaphoresWaitNodeSetParams) M(cudaGraphGetEdges) M(cudaGraphGetEdges_v2)   \
    M(cudaGraphGetNodes) M(cudaGraphGetRootNodes) M(cudaGraphHostNodeGetParams)                    \
    M(cudaGraphHostNodeSetParams) M(cudaGraphInstantiate) M(cudaGraphInstantiateWithFlags)         \
    M(cudaGraphInstantiateWithParams) M(cudaGraphKernelNodeCopyAttributes)                         \
    M(cudaGraphKernelNodeGetAttribute) M(cudaGraphKernelNodeGetParams)                             \
    M(cudaGraphKernelNodeSetAttribute) M(cudaGraphKernelNodeSetParams) M(cudaGraphLaunch)          \
    M(cudaGraphMemAllocNodeGetParams) M(cudaGraphMemFreeNodeGetParams)                             \
    M(cudaGraphMemcpyNodeGetParams) M(cudaGraphMemcpyNodeSetParams)                                \
    M(cudaGraphMemcpyNodeSetParams1D) M(cudaGraphMemcpyNodeSetParamsFromSymbol)                    \
    M(cudaGraphMemcpyNodeSetParamsToSymbol) M(cudaGraphMemsetNodeGetParams)                        \
    M(cudaGraphMemsetNodeSetParams) M(cudaGraphNodeFindInClone) M(cudaGraphNodeGetDependencies)    \
    M(cudaGraphNodeGetDependencies_v2) M(cudaGraphNodeGetDependentNodes)                           \
    M(cudaGraphNodeGetDependentNodes_v2) M(cudaGraphNodeGetEnabled) M(cudaGraphNodeGetType)        \
    M(cudaGraphNodeSetEnabled) M(cudaGraphNodeSetParams) M(cudaGraphReleaseUserObject)             \
    M(cudaGraphRemoveDependencies) M(cudaGraphRemoveDependencies_v2)                               \
    M(cudaGraphRetainUserObject) M(cudaGraphUpload) M(cudaGraphicsMapResources)                    \
    M(cudaGraphicsResourceGetMappedEglFrame) M(cudaGraphicsResourceGetMappedMipmappedArray)        \
    M(cudaGraphicsResourceGetMappedPointer) M(cudaGraphicsResourceSetMapFlags)                     \
    M(cudaGraphicsSubResourceGetMappedArray) M(cudaGraphicsUnmapResources)                         \
    M(cudaGraphicsUnregisterResource) M(cudaHostGetFlags) M(cudaImportExternalMemory)              \
    M(cudaImportExternalSemaphore) M(cudaIpcCloseMemHandle) M(cudaIpcGetEventHandle)               \
    M(cudaIpcGetMemHandle) M(cudaIpcOpenEventHandle) M(cudaIpcOpenMemHandle)                       \
    M(cudaKernelSetAttributeForDevice) M(cudaLaunchCooperativeKernelMultiDevice)                   \
    M(cudaLibraryEnumerateKernels) M(cudaLibraryGetGlobal) M(cudaLibraryGetKernel)                 \
    M(cudaLibraryGetKernelCount) M(cudaLibraryGetManaged) M(cudaLibraryGetUnifiedFunction)         \
    M(cudaLibraryLoadData) M(cudaLibraryLoadFromFile) M(cudaLibraryUnload) M(cudaLogsCurrent)      \
    M(cudaLogsDumpToFile) M(cudaLogsDumpToMemory) M(cudaLogsRegisterCallback)                      \
    M(cudaLogsUnregisterCallback) M(cudaMalloc3D) M(cudaMalloc3DArray) M(cudaMallocArray)          \
    M(cudaMallocFromPoolAsync) M(cudaMallocMipmappedArray)                                         \
    M(cudaMemDiscardAndPrefetchBatchAsync) M(cudaMemDiscardBatchAsync)                             \
    M(cudaMemGetDefaultMemPool) M(cudaMemGetMemPool) M(cudaMemPoolCreate) M(cudaMemPoolDestroy)    \
    M(cudaMemPoolExportPointer) M(cudaMemPoolExportToShareableHandle) M(cudaMemPoolGetAccess)      \
    M(cudaMemPoolGetAttribute) M(cudaMemPoolImportFromShareableHandle)                             \
    M(cudaMemPoolImportPointer) M(cudaMemPoolSetAccess) M(cudaMemPoolSetAttribute)                 \
    M(cudaMemPoolTrimTo) M(cudaMemPrefetchBatchAsync) M(cudaMemRangeGetAttribute)                  \
    M(cudaMemRangeGetAttributes) M(cudaMemSetMemPool) M(cudaMemcpy2DArrayToArray)                  \
    M(cudaMemcpy2DFromArray) M(cudaMemcpy2DFromArrayAsync) M(cudaMemcpy2DToArray)                  \
    M(cudaMemcpy2DToArrayAsync) M(cudaMemcpy3D) M(cudaMemcpy3DAsync) M(cudaMemcpy3DBatchAsync)     \
    M(cudaMemcpy3DPeer) M(cudaMemcpy3DPeerAsync) M(cudaMemcpyArrayToArray)                         \
    M(cudaMemcpyBatchAsync) M(cudaMemcpyFromArray) M(cudaMemcpyFromArrayAsync)                     \
    M(cudaMemcpyToArray) M(cudaMemcpyToArrayAsync) M(cudaMemset3D) M(cudaMemset3DAsync)            \
    M(cudaMipmappedArrayGetMemoryRequirements) M(cudaMipmappedArrayGetSparseProperties)            \
    M(cudaOccupancyAvailableDynamicSMemPerBlock) M(cudaSetDoubleForDevice)                         \
    M(cudaSetDoubleForHost) M(cudaSignalExternalSemaphoresAsync)                                   \
    M(cudaSignalExternalSemaphoresAsync_v2) M(cudaStreamBeginCapture)                              \
    M(cudaStreamBeginCaptureToGraph) M(cudaStreamCopyAttributes) M(cudaStreamEndCapture)           \
    M(cudaStreamGetAttribute) M(cudaStreamGetCaptureInfo) M(cudaStreamGetCaptureInfo_v2)           \
    M(cudaStreamGetCaptureInfo_v3) M(cudaStreamGetId) M(cudaStreamSetAttribute)                    \
    M(cudaStreamUpdateCaptureDependencies) M(cudaStreamUpdateCaptureDependencies_v2)               \
    M(cudaThreadGetCacheConfig) M(cudaThreadGetLimit) M(cudaThreadSetCacheConfig)                  \
    M(cudaThreadSetLimit) M(cudaUserObjectCreate) M(cudaUserObjectRelease)                         \
    M(cudaUserObjectRetain) M(cudaWaitExternalSemaphoresAsync)                                     \
    M(cudaWaitExternalSemaphoresAsync_v2)
/* clang-format on */

static int missing(const char *name) {
    fprintf(stderr, "deepwell emulate: %s is not supported by the emulator\n", name);
    return keep(NOT_SUPPORTED);
}
#define DEFINE(name)                                                                               \
    API int name(void) { return missing(#name); }
MISSING(DEFINE)
